"""The training image: built without a Docker engine, checked, and published by its digest.

`context` gathers what goes in (wheels, and nothing else), `build` makes the image with buildah, `layout` reads an OCI
layout, `rules` judges it, `sbom` lists what it holds, `publish` has the CDK bring it to ECR, with `docker` in the place
of a Docker engine, and releases it. The commands are scripts/build_image, scripts/check_image and
scripts/publish_image; docs/image.md is their page.
"""
