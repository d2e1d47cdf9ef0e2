"""Beyond one layer at a time: allocation, permutation and reconstruction."""
