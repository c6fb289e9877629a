"""What a server does with a message: the catalog of tools, the call, the pipeline around it."""
