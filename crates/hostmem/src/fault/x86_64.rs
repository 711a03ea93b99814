//! The routines for x86-64, and where a fault in one of them continues.
//!
//! They are leaf functions that never touch the stack, so that a fault anywhere inside can be turned into a return
//! with an error by changing the instruction pointer alone. All that can fault lies between two labels.

use std::arch::{global_asm, is_x86_feature_detected};

use super::Fault;

/// The result of an atomic, in the two registers that the ABI returns a pair in.
#[repr(C)]
struct Outcome {
    old: u64,
    failed: u64,
}

unsafe extern "sysv64" {
    fn terrace_fault_copy_sse(to: u64, from: u64, len: usize, anchor: u64) -> u64;
    fn terrace_fault_copy_avx(to: u64, from: u64, len: usize, anchor: u64) -> u64;
    fn terrace_fault_copy_avx512(to: u64, from: u64, len: usize, anchor: u64) -> u64;
    fn terrace_fault_copy_string(to: u64, from: u64, len: usize) -> u64;
    fn terrace_fault_compare_swap(addr: u64, compare: u64, swap: u64) -> Outcome;
    fn terrace_fault_fetch_add(addr: u64, add: u64) -> Outcome;
    fn terrace_fault_swap(addr: u64, value: u64) -> Outcome;

    static terrace_fault_copy_sse_end: u8;
    static terrace_fault_copy_sse_failed: u8;
    static terrace_fault_copy_avx_end: u8;
    static terrace_fault_copy_avx_failed: u8;
    static terrace_fault_copy_avx512_end: u8;
    static terrace_fault_copy_avx512_failed: u8;
    static terrace_fault_copy_string_end: u8;
    static terrace_fault_copy_string_failed: u8;
    static terrace_fault_atomic_start: u8;
    static terrace_fault_atomic_end: u8;
    static terrace_fault_atomic_failed: u8;
}

// copy(to = rdi, from = rsi, len = rdx, anchor = rcx) -> rax, 0 or 1.
//
// The anchor is the address that lies in the program's memory. Single bytes, pairs and quads bring it to a multiple of
// 8, then eights follow, then quads, pairs and bytes again: each aligned part is one access, and the order ascends.
// Long copies have vectors in the middle; each still moves whole eights of the anchor's side. The last step is never a
// vector, so the last byte's store is the last store. No string instruction is used: those may store in any order.
macro_rules! copy_routine {
    ($name:literal, $mov:literal, $reg:literal, $size:literal, $leave:literal) => {
        global_asm!(
            ".text",
            ".p2align 6",
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ",@function"),
            concat!($name, ":"),
            ".cfi_startproc",
            "test cl, 7",
            "jnz 20f",
            // The anchor is a multiple of 8.
            "40:",
            "cmp rdx, 128",
            "jae 30f",
            "41:",
            "sub rdx, 16",
            "jb 13f",
            "12:",
            "mov rax, [rsi]",
            "mov [rdi], rax",
            "mov rax, [rsi + 8]",
            "mov [rdi + 8], rax",
            "add rsi, 16",
            "add rdi, 16",
            "sub rdx, 16",
            "jae 12b",
            "13:",
            // The low four bits of rdx are what is left.
            "test dl, 8",
            "jz 14f",
            "mov rax, [rsi]",
            "mov [rdi], rax",
            "add rsi, 8",
            "add rdi, 8",
            "14:",
            "test dl, 7",
            "jz 19f",
            // Fewer than 8 bytes, in pieces that keep an aligned anchor aligned.
            "15:",
            "test dl, 4",
            "jz 16f",
            "mov eax, [rsi]",
            "mov [rdi], eax",
            "add rsi, 4",
            "add rdi, 4",
            "16:",
            "test dl, 2",
            "jz 17f",
            "movzx eax, word ptr [rsi]",
            "mov [rdi], ax",
            "add rsi, 2",
            "add rdi, 2",
            "17:",
            "test dl, 1",
            "jz 19f",
            "movzx eax, byte ptr [rsi]",
            "mov [rdi], al",
            "19:",
            "xor eax, eax",
            "ret",
            // Bring the anchor to a multiple of 8, as far as there are bytes.
            "20:",
            "test cl, 1",
            "jz 21f",
            "test rdx, rdx",
            "jz 19b",
            "movzx eax, byte ptr [rsi]",
            "mov [rdi], al",
            "inc rsi",
            "inc rdi",
            "inc rcx",
            "dec rdx",
            "21:",
            "test cl, 2",
            "jz 22f",
            "cmp rdx, 2",
            "jb 17b",
            "movzx eax, word ptr [rsi]",
            "mov [rdi], ax",
            "add rsi, 2",
            "add rdi, 2",
            "add rcx, 2",
            "sub rdx, 2",
            "22:",
            "test cl, 4",
            "jz 40b",
            "cmp rdx, 4",
            "jb 16b",
            "mov eax, [rsi]",
            "mov [rdi], eax",
            "add rsi, 4",
            "add rdi, 4",
            "add rcx, 4",
            "sub rdx, 4",
            "jmp 40b",
            // 128 bytes or more. Eights until the target is aligned for vectors, because split stores cost more than
            // split loads; or the source, if eights cannot align the target. The anchor stays a multiple of 8.
            "30:",
            "mov ecx, edi",
            "test edi, 7",
            "cmovnz ecx, esi",
            "neg ecx",
            concat!("and ecx, ", $size, " - 1"),
            "jz 32f",
            "sub rdx, rcx",
            "31:",
            "mov rax, [rsi]",
            "mov [rdi], rax",
            "add rsi, 8",
            "add rdi, 8",
            "sub ecx, 8",
            "jnz 31b",
            "32:",
            // Four vectors at a time while more than four are left.
            concat!("sub rdx, 4 * ", $size, " + 1"),
            "jb 34f",
            ".p2align 4",
            "33:",
            concat!($mov, " ", $reg, "0, [rsi]"),
            concat!($mov, " ", $reg, "1, [rsi + ", $size, "]"),
            concat!($mov, " ", $reg, "2, [rsi + 2 * ", $size, "]"),
            concat!($mov, " ", $reg, "3, [rsi + 3 * ", $size, "]"),
            concat!($mov, " [rdi], ", $reg, "0"),
            concat!($mov, " [rdi + ", $size, "], ", $reg, "1"),
            concat!($mov, " [rdi + 2 * ", $size, "], ", $reg, "2"),
            concat!($mov, " [rdi + 3 * ", $size, "], ", $reg, "3"),
            concat!("add rsi, 4 * ", $size),
            concat!("add rdi, 4 * ", $size),
            concat!("sub rdx, 4 * ", $size),
            "jae 33b",
            "34:",
            concat!("add rdx, 3 * ", $size),
            "jnc 36f",
            "35:",
            concat!($mov, " ", $reg, "0, [rsi]"),
            concat!($mov, " [rdi], ", $reg, "0"),
            concat!("add rsi, ", $size),
            concat!("add rdi, ", $size),
            concat!("sub rdx, ", $size),
            "jae 35b",
            "36:",
            concat!("add rdx, ", $size, " + 1"),
            $leave,
            "jmp 41b",
            concat!(".globl ", $name, "_end"),
            concat!(".hidden ", $name, "_end"),
            concat!($name, "_end:"),
            concat!(".globl ", $name, "_failed"),
            concat!(".hidden ", $name, "_failed"),
            concat!($name, "_failed:"),
            $leave,
            "mov eax, 1",
            "ret",
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
        );
    };
}

copy_routine!("terrace_fault_copy_sse", "movdqu", "xmm", "16", "");
copy_routine!("terrace_fault_copy_avx", "vmovdqu", "ymm", "32", "vzeroupper");
copy_routine!("terrace_fault_copy_avx512", "vmovdqu64", "zmm", "64", "vzeroupper");

// copy_string(to = rdi, from = rsi, len = rdx) -> rax, 0 or 1: in any order.
global_asm!(
    ".text",
    ".p2align 6",
    ".globl terrace_fault_copy_string",
    ".hidden terrace_fault_copy_string",
    ".type terrace_fault_copy_string,@function",
    "terrace_fault_copy_string:",
    ".cfi_startproc",
    "mov rcx, rdx",
    "rep movsb",
    "xor eax, eax",
    "ret",
    ".globl terrace_fault_copy_string_end",
    ".hidden terrace_fault_copy_string_end",
    "terrace_fault_copy_string_end:",
    ".globl terrace_fault_copy_string_failed",
    ".hidden terrace_fault_copy_string_failed",
    "terrace_fault_copy_string_failed:",
    "mov eax, 1",
    "ret",
    ".cfi_endproc",
    ".size terrace_fault_copy_string, . - terrace_fault_copy_string",
);

// compare_swap(addr = rdi, compare = rsi, swap = rdx), fetch_add(addr = rdi, add = rsi), swap(addr = rdi, value = rsi):
// the old value in rax, 0 or 1 in rdx.
global_asm!(
    ".text",
    ".p2align 6",
    ".globl terrace_fault_atomic_start",
    ".hidden terrace_fault_atomic_start",
    "terrace_fault_atomic_start:",
    ".cfi_startproc",
    ".globl terrace_fault_compare_swap",
    ".hidden terrace_fault_compare_swap",
    ".type terrace_fault_compare_swap,@function",
    "terrace_fault_compare_swap:",
    "mov rax, rsi",
    "lock cmpxchg [rdi], rdx",
    "xor edx, edx",
    "ret",
    ".globl terrace_fault_fetch_add",
    ".hidden terrace_fault_fetch_add",
    ".type terrace_fault_fetch_add,@function",
    "terrace_fault_fetch_add:",
    "mov rax, rsi",
    "lock xadd [rdi], rax",
    "xor edx, edx",
    "ret",
    ".globl terrace_fault_swap",
    ".hidden terrace_fault_swap",
    ".type terrace_fault_swap,@function",
    "terrace_fault_swap:",
    "mov rax, rsi",
    "xchg [rdi], rax",
    "xor edx, edx",
    "ret",
    ".globl terrace_fault_atomic_end",
    ".hidden terrace_fault_atomic_end",
    "terrace_fault_atomic_end:",
    ".globl terrace_fault_atomic_failed",
    ".hidden terrace_fault_atomic_failed",
    "terrace_fault_atomic_failed:",
    "mov edx, 1",
    "ret",
    ".cfi_endproc",
);

/// Where a fault at `instruction` continues, if it is one of ours.
fn recovery_of(instruction: u64) -> Option<u64> {
    let recoveries = [
        (
            terrace_fault_copy_avx512 as *const () as u64,
            &raw const terrace_fault_copy_avx512_end,
            &raw const terrace_fault_copy_avx512_failed,
        ),
        (
            terrace_fault_copy_avx as *const () as u64,
            &raw const terrace_fault_copy_avx_end,
            &raw const terrace_fault_copy_avx_failed,
        ),
        (
            terrace_fault_copy_sse as *const () as u64,
            &raw const terrace_fault_copy_sse_end,
            &raw const terrace_fault_copy_sse_failed,
        ),
        (
            terrace_fault_copy_string as *const () as u64,
            &raw const terrace_fault_copy_string_end,
            &raw const terrace_fault_copy_string_failed,
        ),
        (
            &raw const terrace_fault_atomic_start as u64,
            &raw const terrace_fault_atomic_end,
            &raw const terrace_fault_atomic_failed,
        ),
    ];
    recoveries
        .iter()
        .find(|(start, end, _)| (*start..*end as u64).contains(&instruction))
        .map(|(_, _, failed)| *failed as u64)
}

/// If the interrupted instruction is one of ours: makes the context continue with an error return. Async-signal-safe.
///
/// # Safety
/// `context` is the one that the kernel gave to a signal handler.
pub(super) unsafe fn recover(context: *mut libc::c_void) -> bool {
    // SAFETY: the kernel's context is a ucontext_t that lives until the handler returns.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let instruction = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
    let Some(recovery) = recovery_of(*instruction as u64) else { return false };
    *instruction = recovery as i64;
    true
}

/// Copies `len` bytes; `anchor` equals the address that lies in the program's memory.
///
/// # Safety
/// Both ranges may be accessed so, or are no memory at all.
#[inline(always)]
pub(super) unsafe fn copy(to: u64, from: u64, len: usize, anchor: u64) -> Result<(), Fault> {
    // SAFETY: as the caller promises; the AVX routines run only where AVX exists.
    unsafe {
        if is_x86_feature_detected!("avx512f") {
            copy_avx512(to, from, len, anchor)
        } else if is_x86_feature_detected!("avx") {
            copy_avx(to, from, len, anchor)
        } else {
            copy_sse(to, from, len, anchor)
        }
    }
}

/// Copies `len` bytes in any order.
///
/// # Safety
/// As for [`copy`].
#[inline]
pub(super) unsafe fn copy_unordered(to: u64, from: u64, len: usize) -> Result<(), Fault> {
    if !is_x86_feature_detected!("ermsb") {
        // SAFETY: as the caller promises.
        return unsafe { copy(to, from, len, to) };
    }
    // SAFETY: the routine accesses nothing but the two ranges.
    if unsafe { terrace_fault_copy_string(to, from, len) } == 0 { Ok(()) } else { Err(Fault) }
}

/// # Safety
/// As for [`copy`].
#[inline]
pub(super) unsafe fn copy_sse(to: u64, from: u64, len: usize, anchor: u64) -> Result<(), Fault> {
    // SAFETY: the routine accesses nothing but the two ranges.
    if unsafe { terrace_fault_copy_sse(to, from, len, anchor) } == 0 { Ok(()) } else { Err(Fault) }
}

/// # Safety
/// As for [`copy`], and the processor has AVX.
#[inline]
pub(super) unsafe fn copy_avx(to: u64, from: u64, len: usize, anchor: u64) -> Result<(), Fault> {
    // SAFETY: the routine accesses nothing but the two ranges.
    if unsafe { terrace_fault_copy_avx(to, from, len, anchor) } == 0 { Ok(()) } else { Err(Fault) }
}

/// # Safety
/// As for [`copy`], and the processor has AVX-512F.
#[inline]
pub(super) unsafe fn copy_avx512(to: u64, from: u64, len: usize, anchor: u64) -> Result<(), Fault> {
    // SAFETY: the routine accesses nothing but the two ranges.
    if unsafe { terrace_fault_copy_avx512(to, from, len, anchor) } == 0 { Ok(()) } else { Err(Fault) }
}

fn old_value(outcome: Outcome) -> Result<u64, Fault> {
    if outcome.failed == 0 { Ok(outcome.old) } else { Err(Fault) }
}

/// # Safety
/// `addr` may be overwritten, or is no memory at all.
#[inline]
pub(super) unsafe fn compare_swap(addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    // SAFETY: the routine accesses nothing but the 8 bytes at `addr`.
    old_value(unsafe { terrace_fault_compare_swap(addr, compare, swap) })
}

/// # Safety
/// `addr` may be overwritten, or is no memory at all.
#[inline]
pub(super) unsafe fn fetch_add(addr: u64, add: u64) -> Result<u64, Fault> {
    // SAFETY: the routine accesses nothing but the 8 bytes at `addr`.
    old_value(unsafe { terrace_fault_fetch_add(addr, add) })
}

/// # Safety
/// `addr` may be overwritten, or is no memory at all.
#[inline]
pub(super) unsafe fn swap(addr: u64, value: u64) -> Result<u64, Fault> {
    // SAFETY: the routine accesses nothing but the 8 bytes at `addr`.
    old_value(unsafe { terrace_fault_swap(addr, value) })
}
