"""Numbers become one HTML page: where the error lives, and what to do about it."""
