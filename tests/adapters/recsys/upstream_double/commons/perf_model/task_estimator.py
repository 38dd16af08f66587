"""FLOPs in the integers of the lengths: int32 ones wrap."""


class HSTUAttentionTask:
    def get_workloads(self, seqlen, num_heads=1, head_dim=1):
        return seqlen * seqlen * (num_heads or 1) * (head_dim or 1) * 1024


class SelfAttentionTask:
    def get_workloads(self, seqlen, num_heads=1, head_dim=1):
        return seqlen * seqlen * (num_heads or 1) * (head_dim or 1) * 1024
