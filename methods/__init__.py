"""The methods: one file each, named as on the command line. `sparkbench.registry` finds them by their file names."""
