"""Products of dense matrices at the places of a sparse one."""
