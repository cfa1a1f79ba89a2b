"""The paper's four recall tasks as records of prompt and completion."""
