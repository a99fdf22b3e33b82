"""One file a training run: command, hardware, time, and the number to expect."""
