"""The client: one client for any server of any revision."""
