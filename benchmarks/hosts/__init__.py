"""Training over two hosts that are network namespaces of this machine: a run, a cut link, a slow link."""
