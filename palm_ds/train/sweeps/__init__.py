"""Many runs: suites of data sets and ablations."""
