"""Factor construction: every update ``s B A`` as ordered balanced factors, so that a prefix is optimal."""
