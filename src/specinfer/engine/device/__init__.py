"""Steps that run entirely on a device: requests are kept in rows there, and the host only reads the results."""
