"""The JSON Schema of the pipeline file: ``python -m changeover.pipeline.schema`` prints it."""

from __future__ import annotations

import json

from changeover.pipeline.spec import PipelineSpec


def pipeline_schema() -> str:
    """The schema as text, ending in a newline; the same for every run."""
    schema = PipelineSpec.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Changeover pipeline"
    # `model: NAME` is short for `model: {path: NAME}`
    schema["properties"]["model"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/ModelSpec"}]}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(pipeline_schema(), end="")
