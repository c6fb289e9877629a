"""OAuth, as a resource server sees it (tokens come in, principals go out) and as a client gets its tokens."""
