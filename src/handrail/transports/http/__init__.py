"""The HTTP endpoint: any ASGI server can serve it."""
