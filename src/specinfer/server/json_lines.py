"""Log lines as JSON. Nothing heavy is imported here, because the parent of the server writes such lines, too."""

import json
import logging
from datetime import UTC, datetime


class JSONLine(logging.Formatter):
    """A format with an object a line, whose keys are time (UTC), level, logger, message, request and exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", None):
            fields["request"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)
