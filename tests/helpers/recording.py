"""A replacement for CUDA graphs on machines without a GPU."""


class Repeat:
    """Like CudaGraphRecorder: runs the step to warm up and at every replay, into the same result tensors."""

    def __init__(self):
        self.recorded = 0

    def __call__(self, run):
        self.recorded += 1
        run(), run()
        output = run()

        def replay():
            value = run()
            if output is not None:
                output.copy_(value)

        return output, replay
