"""What the benches and the tuner share: problems, timing by graph, plans."""
