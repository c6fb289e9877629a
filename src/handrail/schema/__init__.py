"""JSON Schema: from Python signatures, into compiled checks, and back into sentences a model can act on."""
