"""Studies: training runs and measurements made once, at a stated cost. Their tests: pytest benchmarks/studies."""
