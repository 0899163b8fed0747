"""What is shown of results. `summary` is the table at the end of a run; nothing here measures or decides."""
