"""The audit log: records in a hash chain, where they are stored, how they are read and verified."""
