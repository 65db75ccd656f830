from kdist.cluster import environment
class Workers:
    num_workers=1; worker_index=0
    def all_devices(self, local): return local
    def all_gather_bytes(self, data): return [data]
    def explain_failure(self, e): return e
def join(devices, cluster, options): return Workers()
