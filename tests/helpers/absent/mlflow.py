"""On the path of launchers: DeepSpeed imports MLflow, if it is installed, for its autotuner, which
takes each of a launcher's processes as long as all else that they import."""

raise ImportError("not in the tests of launchers")
