"""Steps that a device takes by itself: requests stand in rows there, and the host only reads what they said."""
