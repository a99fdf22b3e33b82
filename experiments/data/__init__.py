"""Where does training data come from? Text on this machine, prompts, the target's own answers."""
