"""HTTP/1.1 with limits: connection, request, server, in place of uvicorn's protocol."""
