"""Operations on tensors: one signature each (`api`), a slow obvious form (`reference`), a fast one for CPUs (`cpu`)."""
