#!/bin/sh
# Regenerates bindings.rs from the installed headers. Needed only for another version of the header: cargo install
# bindgen-cli, apt-get install libibverbs-dev libclang-dev.
set -eu
cd "$(dirname "$0")"
bindgen wrapper.h --output bindings.rs \
    --rust-target 1.85 --rust-edition 2024 \
    --use-core --ctypes-prefix core::ffi \
    --default-enum-style consts --no-prepend-enum-name \
    --no-layout-tests --no-doc-comments --generate types,vars \
    --allowlist-type 'ibv_.*|verbs_context|_ibv_device_ops' \
    --allowlist-type 'ib_uverbs_(ah|qp)_attr|ib_user_path_rec' \
    --allowlist-var 'IBV_.*|ETHERNET_LL_SIZE|IB_UVERBS_ACCESS_OPTIONAL_.*|IB_UVERBS_ADVISE_MR_.*' \
    --blocklist-type 'pthread_mutex_t|pthread_cond_t|timespec|__pthread.*|__time_t|__syscall_slong_t' \
    --raw-line '// Written by regenerate.sh from the headers of rdma-core 44; do not edit.' \
    --raw-line 'use libc::{pthread_cond_t, pthread_mutex_t, timespec};'
rustfmt --edition 2024 bindings.rs
