"""What runs a handler: `python -I -S bootstrap.py CODE HANDLER RUNTIME ANSWER`, the event on stdin.

CODE is the unpacked package, RUNTIME a folder with boto3, ANSWER the file that gets what the handler returns, or its
error. What the code prints is its log. Imports nothing of ours: it is not the function's to see.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path


class Context:
    """The few things of Lambda's context object that a function may ask for."""

    def __init__(self) -> None:
        import os

        self.function_name = os.environ["AWS_LAMBDA_FUNCTION_NAME"]
        self.invoked_function_arn = os.environ["TRAINYARD_FUNCTION_ARN"]
        self.aws_request_id = os.environ["TRAINYARD_REQUEST_ID"]
        self.log_group_name = os.environ["AWS_LAMBDA_LOG_GROUP_NAME"]
        self.log_stream_name = os.environ["AWS_LAMBDA_LOG_STREAM_NAME"]


def main(code: str, handler: str, runtime: str, answer: str) -> int:
    """0: ANSWER holds the handler's result; 1: its error."""
    sys.path[:0] = [code, runtime]
    module, _, function = handler.rpartition(".")
    try:
        event = json.load(sys.stdin)
        result = getattr(importlib.import_module(module.replace("/", ".")), function)(event, Context())
        text = json.dumps(result)
    except BaseException as error:
        traceback.print_exc()
        text = json.dumps({"errorMessage": str(error), "errorType": type(error).__name__})
        code_of_exit = 1
    else:
        code_of_exit = 0
    Path(answer).write_text(text, encoding="utf-8")
    return code_of_exit


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
