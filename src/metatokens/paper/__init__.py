"""The reproduction of the paper: presets, their plan and its workers, and the report."""
