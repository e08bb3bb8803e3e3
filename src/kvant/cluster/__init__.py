"""Several replicas of one server under Ray, behind one address.

    front      HTTP: asks a replica, retries on another one, informs clients whose replica ended
    replica    a whole server without HTTP, run in an actor of Ray Serve
    placement  Ray Serve's deployment of replicas, its router, and the application for `serve run`
    serve      `kvant serve --ray`: the front in this process, and its deployment

Only placement and serve import Ray, which chooses machines and processes. `front` decides what clients see.
"""
