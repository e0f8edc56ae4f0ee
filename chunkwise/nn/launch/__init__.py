"""The modules' kernels on a GPU: allocate, choose block sizes, launch. Formulas are in the kernels. Needs Triton."""
