"""The report's tables, of strings, which the page and its Markdown both print."""
