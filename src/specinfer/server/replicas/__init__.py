"""Several engines behind one port: replicas that Ray Serve keeps alive, on this machine or on others."""
