"""Several engines behind one port: processes that Ray Serve keeps alive, here or on other machines."""
