"""What a tool call costs: `make bench`, explained in docs/benchmarks.md."""
