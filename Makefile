# `make` builds train_gpt for the CPU, `make cuda` builds train_gpt_cuda; `make help` lists the rest.
# Variables: CC (gcc or clang), PRECISION (fp32 or bf16), OPT (-O3), ARCH (native), MPI (auto, yes or no), MPICC (mpicc), NVCC,
# CUDA_ARCHS (80 90a 100), V=1 shows commands. `make test_gpt OPT="-O3 -DOPS_VERBOSE"`: rows print the errors that they find.
CC = gcc
CXX = g++
NVCC = nvcc
OPT = -O3
ARCH = native
PRECISION = fp32
CUDA_PRECISION = bf16
CUDA_ARCHS = 80 90a 100
OPENMP = -fopenmp
MPI = auto
MPICC = mpicc

Q = $(if $(V),,@)
GIT_HASH := $(shell hash=$$(git rev-parse --short=12 HEAD 2>/dev/null) && { git diff --quiet HEAD || hash=$$hash+changes; }; echo $${hash:-unknown})
SOURCES := train_gpt.cu $(wildcard kernels/*.h kernels/*.cuh optim/*.h optim/*.cuh comm/*.h comm/*.cuh dataloader/*.h trainer/*.h \
	trainer/*.cuh) build/flags
TESTS := test_gpt.cu $(wildcard dev/*.h dev/fixtures/*)
WARN = -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion
IS_CLANG := $(shell $(CC) --version 2>/dev/null | grep -c clang)

# several ranks need MPI: `mpicc -show` prints the compiler's command line, of which we take what all our compilers know
ifneq ($(MPI),no)
MPI_SHOWN := $(shell $(MPICC) -show 2>/dev/null)
ifneq ($(MPI_SHOWN),)
MPI_FLAGS := -DUSE_MPI -DOMPI_SKIP_MPICXX $(filter -I%,$(MPI_SHOWN))
MPI_LIBS := $(filter -L% -l%,$(MPI_SHOWN))
MPI_RPATH := $(filter -Wl%,$(MPI_SHOWN))
else ifeq ($(MPI),yes)
$(error MPI=yes, but "$(MPICC) -show" says nothing: install libopenmpi-dev and openmpi-bin, or name the wrapper by MPICC=)
endif
endif

# no -ffast-math: NaN checks must work. libmvec gives vectorised expf and tanhf all the same (kernels/base.h)
CFLAGS = -x c -std=gnu11 -D_GNU_SOURCE $(OPT) -march=$(ARCH) -fno-math-errno -fno-trapping-math $(OPENMP) $(WARN) $(DEFINES) $(MPI_FLAGS)
LIBS = -x none $(MPI_RPATH) $(MPI_LIBS) -lpcre2-8 -lm -ldl -lpthread
ifeq ($(IS_CLANG),0)
LIBS += $(if $(filter x86_64,$(shell uname -m)),-lmvec)
else
CFLAGS += -Wno-unknown-pragmas -Wno-pass-failed
endif
CFLAGS += $(if $(OPENMP),,-Wno-unknown-pragmas)
DEFINES = $(if $(filter bf16,$(PRECISION)),-DFLOATX_BF16) -DGIT_HASH='"$(GIT_HASH)"' -DBUILD_FLAGS='"$(CC) $(OPT) -march=$(ARCH) $(PRECISION)"'

# machine code of each, and PTX that the driver compiles where none of them fits
CUDA_PTX ?= 80
CUDA_GENCODE = $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(CUDA_PTX),code=compute_$(CUDA_PTX)
NVFLAGS = -std=c++20 -O3 -t 0 $(CUDA_GENCODE) -D_GNU_SOURCE -Xcompiler -Wall,-Wextra,-fopenmp$(HOST_SSE) -diag-suppress 177 $(NVDEFINES) $(MPI_FLAGS)
# for checksums: every host of a GPU has it
HOST_SSE = $(if $(filter x86_64,$(shell uname -m)),$(comma)-msse4.2)
NVDEFINES = $(if $(filter bf16,$(CUDA_PRECISION)),-DFLOATX_BF16) -DGIT_HASH='"$(GIT_HASH)"' \
	-DBUILD_FLAGS='"nvcc sm_$(subst $() ,+,$(strip $(CUDA_ARCHS))) $(CUDA_PRECISION)"'
comma := ,
NVLIBS = -lcublasLt -lnccl $(foreach f,$(MPI_RPATH),-Xlinker $(patsubst -Wl$(comma)%,%,$(f))) $(MPI_LIBS) -lpcre2-8 -ldl

.PHONY: FORCE all cuda help run test bench debug lint flags clean
all: train_gpt

help:
	@echo "make              train_gpt, the CPU program (CC=clang, PRECISION=bf16, OPT=-O0, ARCH=x86-64-v3, MPI=no ...)"
	@echo "make cuda         train_gpt_cuda and test_gpt_cuda (CUDA_ARCHS=\"90a\", CUDA_PRECISION=fp32)"
	@echo "make run          the quickstart: real text, a tokenizer, a small model, a sample"
	@echo "make test         build and run every test; the last line is: N passed, N failed"
	@echo "make bench        share of the step that each op takes, and of the measured peak that it reaches"
	@echo "make build/bench_attention, build/bench_newton_schulz   those two at many shapes"
	@echo "make build/bench_comm   bandwidth between ranks: mpirun -np 4 build/bench_comm"
	@echo "make debug        train_gpt and test_gpt with address and undefined-behaviour checks, in build/"
	@echo "make lint         warnings of gcc, clang and g++ on the whole program, shellcheck, vectorised loops"
	@echo "make clean        remove what was built"

train_gpt: $(SOURCES) Makefile
	$(Q)$(CC) $(CFLAGS) train_gpt.cu -o $@ $(LIBS)

test_gpt: $(SOURCES) $(TESTS) Makefile
	$(Q)$(CC) $(CFLAGS) test_gpt.cu -o $@ $(LIBS)

build/test_gpt_bf16: $(SOURCES) $(TESTS) Makefile | build
	$(Q)$(CC) $(CFLAGS) -DFLOATX_BF16 test_gpt.cu -o $@ $(LIBS)

# the CUDA branch on the CPU, for tests: every CUDA thread a fiber (dev/cuda_on_cpu.h)
build/test_gpt_emulated build/test_gpt_emulated_bf16: $(SOURCES) $(TESTS) Makefile | build
	$(Q)$(CXX) -x c++ -std=c++20 -D_GNU_SOURCE -DCUDA_ON_CPU $(if $(findstring bf16,$@),-DFLOATX_BF16) -O2 -march=$(ARCH) $(OPENMP) -Wall -Wextra \
		$(MPI_FLAGS) test_gpt.cu -o $@ $(LIBS)

SANITIZE = -g -O1 -march=$(ARCH) -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
debug: build/train_gpt_debug build/test_gpt_debug
build/train_gpt_debug build/test_gpt_debug: build/%_debug: $(SOURCES) $(TESTS) Makefile | build
	$(Q)$(CC) $(CFLAGS) $(SANITIZE) $*.cu -o $@ $(LIBS)

cuda: train_gpt_cuda test_gpt_cuda
train_gpt_cuda test_gpt_cuda: %_cuda: $(SOURCES) $(TESTS) Makefile
	$(Q)$(NVCC) $(NVFLAGS) $*.cu -o $@ $(NVLIBS)

build:
	$(Q)mkdir -p build

# changes with what a build was told, so that other flags, or MPI installed meanwhile, build anew
FLAGS := $(CC) $(OPT) $(ARCH) $(PRECISION) $(OPENMP) $(MPI_FLAGS) $(MPI_LIBS) $(CUDA_ARCHS) $(CUDA_PRECISION)
build/flags: FORCE | build
	$(Q)echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
FORCE:

run:
	$(Q)bash scripts/quickstart.sh
test:
	$(Q)bash scripts/test.sh
bench: build/bench
	$(Q)build/bench
build/bench build/bench_attention build/bench_comm build/bench_newton_schulz: build/%: $(SOURCES) $(wildcard dev/*.cu dev/*.h) Makefile | build
	$(Q)$(CC) $(CFLAGS) dev/$*.cu -o $@ $(LIBS)
lint:
	$(Q)bash scripts/lint.sh
flags: # for lint.sh
	$(info $(CFLAGS))@:
clean:
	rm -rf build train_gpt test_gpt train_gpt_cuda test_gpt_cuda
