"""Chat requests as agents send them: extraction into schemas, calls of tools, edits, quotes, and several samples."""
