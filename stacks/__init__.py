"""The AWS side of trainyard: what one environment file becomes, by `environment.deploy_environment`.

`constructs/` models (a network, keys, roles, ...), the modules here deploy. Per environment one platform stack; per
tenant a foundation stack with everything stateful and every principal that a key policy names, and a training
stack that can be thrown away and made again. Nothing here reads the process environment or looks anything up:
the same environment file always gives the same templates.
"""
