//! ggml's side: its quantised matrices, its thread pool, one graph per sample.
//!
//! The only module that calls C. Everything ggml gives out is held by a type that frees it,
//! and what refers to something else borrows it or shares its ownership.

use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use crate::contender::{Contender, Shape};

/// A ggml weight type and the kind of buffer that holds it.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    name: &'static str,
    bits: u8,
    code: sys::ggml_type,
    repacked: bool,
}

impl Kind {
    /// Engine, weight type and kind of buffer.
    pub fn name(&self) -> String {
        format!("ggml {}", self.name)
    }
}

/// Everything that is measured. Not every machine has repacked kernels for every type.
pub const KINDS: [Kind; 6] = [
    Kind { name: "Q4_0", bits: 4, code: sys::GGML_TYPE_Q4_0, repacked: false },
    Kind { name: "Q4_0 repacked", bits: 4, code: sys::GGML_TYPE_Q4_0, repacked: true },
    Kind { name: "Q4_K", bits: 4, code: sys::GGML_TYPE_Q4_K, repacked: false },
    Kind { name: "Q4_K repacked", bits: 4, code: sys::GGML_TYPE_Q4_K, repacked: true },
    Kind { name: "Q8_0", bits: 8, code: sys::GGML_TYPE_Q8_0, repacked: false },
    Kind { name: "Q8_0 repacked", bits: 8, code: sys::GGML_TYPE_Q8_0, repacked: true },
];

/// Keeps ggml from telling about every matrix that it repacks.
pub fn be_quiet() {
    unsafe extern "C" fn drop_line(_: sys::ggml_log_level, _: *const std::ffi::c_char, _: *mut c_void) {}
    // SAFETY: the function ignores its arguments and lives as long as the program.
    unsafe { sys::ggml_log_set(Some(drop_line), ptr::null_mut()) }
}

/// ggml's version and the instruction sets it was compiled for.
pub fn version() -> String {
    // SAFETY: plain queries; the version is a static C string.
    let (version, features) = unsafe {
        sys::ggml_cpu_init();
        let features = [
            ("avx2", sys::ggml_cpu_has_avx2()),
            ("avx512", sys::ggml_cpu_has_avx512()),
            ("avx512-vnni", sys::ggml_cpu_has_avx512_vnni()),
            ("avx512-bf16", sys::ggml_cpu_has_avx512_bf16()),
            ("neon", sys::ggml_cpu_has_neon()),
            ("dotprod", sys::ggml_cpu_has_dotprod()),
            ("i8mm", sys::ggml_cpu_has_matmul_int8()),
            ("llamafile", sys::ggml_cpu_has_llamafile()),
        ];
        (CStr::from_ptr(sys::ggml_version()).to_string_lossy().into_owned(), features)
    };
    let features: Vec<&str> =
        features.into_iter().filter(|(_, has)| *has != 0).map(|(name, _)| name).collect();
    format!("{version} ({})", features.join(" "))
}

/// A ggml context: tensor headers only, their data lives in buffers.
#[derive(Debug)]
struct Context(NonNull<sys::ggml_context>);

impl Context {
    /// Room for `tensors` tensors and one graph of them.
    fn new(tensors: usize) -> Self {
        // SAFETY: ggml allocates the context's memory itself.
        let raw = unsafe {
            let graph = sys::ggml_graph_overhead_custom(tensors, false);
            sys::ggml_init(sys::ggml_init_params {
                mem_size: tensors * sys::ggml_tensor_overhead() + graph,
                mem_buffer: ptr::null_mut(),
                no_alloc: true,
            })
        };
        Self(NonNull::new(raw).expect("ggml has memory for a context"))
    }

    fn matrix(&self, code: sys::ggml_type, cols: usize, rows: usize) -> *mut sys::ggml_tensor {
        // SAFETY: the context is live and was made large enough.
        unsafe { sys::ggml_new_tensor_2d(self.0.as_ptr(), code, cols as i64, rows as i64) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `ggml_init`, freed once.
        unsafe { sys::ggml_free(self.0.as_ptr()) }
    }
}

/// The memory behind the tensors of a context.
#[derive(Debug)]
struct Buffer(NonNull<sys::ggml_backend_buffer>);

impl Buffer {
    /// Memory for every tensor that `context` holds so far.
    fn of(context: &Context, buffer_type: sys::ggml_backend_buffer_type_t) -> Self {
        // SAFETY: both are live.
        let raw = unsafe { sys::ggml_backend_alloc_ctx_tensors_from_buft(context.0.as_ptr(), buffer_type) };
        Self(NonNull::new(raw).expect("ggml has memory for the tensors"))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: made by ggml, freed once.
        unsafe { sys::ggml_backend_buffer_free(self.0.as_ptr()) }
    }
}

/// The buffer type of the repacked kernels, looked up as llama.cpp does.
fn repack_buffer_type() -> Option<sys::ggml_backend_buffer_type_t> {
    type ExtraTypes = unsafe extern "C" fn(sys::ggml_backend_dev_t) -> *mut sys::ggml_backend_buffer_type_t;
    // SAFETY: the CPU backend is compiled in; ggml documents this address as a function of this
    // type, and its result as a list that ends with null.
    unsafe {
        let registry = sys::ggml_backend_cpu_reg();
        let device = sys::ggml_backend_reg_dev_get(registry, 0);
        let address =
            sys::ggml_backend_reg_get_proc_address(registry, c"ggml_backend_dev_get_extra_bufts".as_ptr());
        if address.is_null() {
            return None;
        }
        let extra_types: ExtraTypes = std::mem::transmute(address);
        let mut entry = extra_types(device);
        while !entry.is_null() && !(*entry).is_null() {
            if CStr::from_ptr(sys::ggml_backend_buft_name(*entry)) == c"CPU_REPACK" {
                return Some(*entry);
            }
            entry = entry.add(1);
        }
        None
    }
}

/// ggml's threads. They spin for a while after a graph, so they are paused between samples.
#[derive(Debug)]
pub struct Pool {
    raw: NonNull<sys::ggml_threadpool>,
    threads: i32,
}

impl Pool {
    /// ggml's own defaults for `threads` threads, the caller included.
    pub fn new(threads: usize) -> Self {
        let threads = i32::try_from(threads).expect("a sensible number of threads");
        // SAFETY: the parameters are ggml's defaults and live during the call.
        let raw = unsafe {
            let mut params = sys::ggml_threadpool_params_default(threads);
            params.paused = true;
            sys::ggml_threadpool_new(&mut params)
        };
        Self { raw: NonNull::new(raw).expect("ggml can start its threads"), threads }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: made by `ggml_threadpool_new`, freed once; no graph is running.
        unsafe { sys::ggml_threadpool_free(self.raw.as_ptr()) }
    }
}

/// Several equal matrices in memory of their own.
#[derive(Debug)]
pub struct Weights {
    kind: Kind,
    shape: Shape,
    tensors: Vec<*mut sys::ggml_tensor>,
    bytes: usize,
    _buffer: Buffer,
    _context: Context,
}

impl Weights {
    /// Quantises `values`, repeats these rows until the matrix is full, and lays out enough
    /// matrices to fill `total_bytes`; `None` if ggml has no such kernels for this machine.
    pub fn new(kind: Kind, shape: Shape, values: &[f32], total_bytes: usize) -> Option<Self> {
        let Shape { rows, cols } = shape;
        let distinct = values.len() / cols;
        assert_eq!(values.len(), distinct * cols, "whole rows of weights");
        // SAFETY: a query.
        let row_bytes = unsafe { sys::ggml_row_size(kind.code, cols as i64) };
        let mut codes = vec![0u8; row_bytes * distinct];
        // SAFETY: `codes` has exactly the bytes that this many rows take.
        let written = unsafe {
            sys::ggml_quantize_chunk(
                kind.code,
                values.as_ptr(),
                codes.as_mut_ptr().cast::<c_void>(),
                0,
                distinct as i64,
                cols as i64,
                ptr::null(),
            )
        };
        assert_eq!(written, codes.len(), "ggml fills the codes");
        let codes = codes.repeat(rows / distinct);
        let bytes = codes.len();
        assert_eq!(bytes, row_bytes * rows, "the rows fill the matrix");

        let buffer_type = if kind.repacked {
            repack_buffer_type()?
        } else {
            // SAFETY: a query.
            unsafe { sys::ggml_backend_cpu_buffer_type() }
        };
        let copies = total_bytes.div_ceil(bytes);
        let context = Context::new(copies);
        let tensors: Vec<_> = (0..copies).map(|_| context.matrix(kind.code, cols, rows)).collect();
        let buffer = Buffer::of(&context, buffer_type);
        for tensor in &tensors {
            // SAFETY: the tensor is live and has memory for `bytes` bytes. A repacked type that
            // this machine has no kernels for has no `extra`, and must not be filled.
            unsafe {
                if kind.repacked && (**tensor).extra.is_null() {
                    return None;
                }
                sys::ggml_backend_tensor_set(*tensor, codes.as_ptr().cast::<c_void>(), 0, bytes);
            }
        }
        Some(Self { kind, shape, tensors, bytes, _buffer: buffer, _context: context })
    }
}

/// Activations and the place of the results.
#[derive(Debug)]
struct Rows {
    x: *mut sys::ggml_tensor,
    y: *mut sys::ggml_tensor,
    results: usize,
    buffer: Buffer,
    _context: Context,
}

/// A graph of products, one after the other, that rotates over the matrices.
#[derive(Debug)]
struct Graph {
    raw: *mut sys::ggml_cgraph,
    plan: sys::ggml_cplan,
    _work: Vec<u8>,
    _context: Context,
}

/// ggml's products of one weight kind with one batch of activations.
#[derive(Debug)]
pub struct Products<'a> {
    graph: Option<Graph>,
    rows: Rows,
    weights: &'a Weights,
    pool: Rc<Pool>,
}

impl<'a> Products<'a> {
    /// Products with `x`, `[batch, cols]`, row-major.
    pub fn new(weights: &'a Weights, pool: Rc<Pool>, x: &[f32]) -> Self {
        let Shape { rows, cols } = weights.shape;
        let batch = x.len() / cols;
        assert_eq!(x.len(), batch * cols, "whole rows of activations");
        let context = Context::new(2);
        let input = context.matrix(sys::GGML_TYPE_F32, cols, batch);
        let output = context.matrix(sys::GGML_TYPE_F32, rows, batch);
        // SAFETY: a query.
        let buffer = Buffer::of(&context, unsafe { sys::ggml_backend_cpu_buffer_type() });
        // SAFETY: the tensor has memory for exactly these floats.
        unsafe { sys::ggml_backend_tensor_set(input, x.as_ptr().cast::<c_void>(), 0, size_of_val(x)) };
        let rows = Rows { x: input, y: output, results: rows * batch, buffer, _context: context };
        Self { graph: None, rows, weights, pool }
    }
}

impl Contender for Products<'_> {
    fn name(&self) -> String {
        self.weights.kind.name()
    }

    fn bits(&self) -> u8 {
        self.weights.kind.bits
    }

    fn matrix_bytes(&self) -> usize {
        self.weights.bytes
    }

    fn prepare(&mut self, products: usize) {
        let tensors = &self.weights.tensors;
        let size = products + tensors.len() + 1;
        let context = Context::new(size);
        // SAFETY: the context has room for the graph and its nodes; weights, activations and
        // results outlive the graph, being held by `self`. Every node writes its results to the
        // same place, which is as large as each of them.
        let (raw, mut plan) = unsafe {
            let raw = sys::ggml_new_graph_custom(context.0.as_ptr(), size, false);
            for product in 0..products {
                let weights = tensors[product % tensors.len()];
                let node = sys::ggml_mul_mat(context.0.as_ptr(), weights, self.rows.x);
                sys::ggml_backend_tensor_alloc(self.rows.buffer.0.as_ptr(), node, (*self.rows.y).data);
                sys::ggml_build_forward_expand(raw, node);
            }
            assert_eq!(sys::ggml_graph_n_nodes(raw) as usize, products, "one node per product");
            (raw, sys::ggml_graph_plan(raw, self.pool.threads, self.pool.raw.as_ptr()))
        };
        assert_eq!(plan.n_threads, self.pool.threads, "ggml uses the threads it was given");
        let mut work = vec![0u8; plan.work_size];
        plan.work_data = work.as_mut_ptr();
        self.graph = Some(Graph { raw, plan, _work: work, _context: context });
    }

    fn wake(&mut self) {
        // SAFETY: the pool is live.
        unsafe { sys::ggml_threadpool_resume(self.pool.raw.as_ptr()) }
    }

    fn run(&mut self) {
        let graph = self.graph.as_mut().expect("prepared");
        // SAFETY: the graph, its plan and all that it refers to are live, and used by nobody else.
        let status = unsafe { sys::ggml_graph_compute(graph.raw, &mut graph.plan) };
        assert_eq!(status, sys::GGML_STATUS_SUCCESS, "ggml computes the graph");
    }

    fn rest(&mut self) {
        // SAFETY: the pool is live and no graph is running.
        unsafe { sys::ggml_threadpool_pause(self.pool.raw.as_ptr()) }
    }

    fn results(&self) -> Vec<f32> {
        let mut results = vec![0f32; self.rows.results];
        let bytes = size_of_val(results.as_slice());
        // SAFETY: the tensor holds exactly these floats.
        unsafe { sys::ggml_backend_tensor_get(self.rows.y, results.as_mut_ptr().cast::<c_void>(), 0, bytes) };
        results
    }
}
