"""`specinfer quantize`: a model's weights rounded once, and written in a public format."""
