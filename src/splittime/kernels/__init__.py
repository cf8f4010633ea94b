"""Operations on tensors: one signature each (`api`), a slow obvious form (`reference`) and one fast on a CPU (`cpu`)."""
