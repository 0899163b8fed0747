"""Where drafters and the embedded default are made: training text, training loops and export."""
