"""What an adapter is and how uploads are read: values and rules, standard library only."""
