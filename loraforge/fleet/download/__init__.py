"""Bytes from hubs and web servers into the store: resumable, checked, and with tokens for their own hosts alone."""
