"""Several replicas of one server under Ray, behind one address.

    front      HTTP: asks a replica, tries again elsewhere, tells clients whose replica ended
    replica    a whole server without HTTP in an actor of Ray Serve, which places, checks and scales it
    ray        the only module that imports Ray: the deployment, its router, the application

Ray chooses machines and processes. What a client sees is decided in `front`, which needs no Ray.
"""
