"""The gateway: a server that includes upstream servers, whose tools, resources and prompts live elsewhere."""
