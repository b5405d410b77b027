"""In the place of CUDA graphs where there is no GPU."""


class Repeat:
    """As CudaGraphRecorder: runs the step to warm up, and again on every replay, with its result where it was."""

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
