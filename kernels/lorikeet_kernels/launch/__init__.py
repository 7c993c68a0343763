"""What launches share that belongs to no op: the device's name, one launch waiting for another."""
