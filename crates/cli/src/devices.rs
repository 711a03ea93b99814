//! `terrace devices`: the device that a program would get, without starting a program.

use crate::output::print;
use crate::run::{RunError, parse_port};
use crate::{json, table};
use clap::Args;
use serde::Serialize;
use std::net::Ipv6Addr;
use terrace_fabric::Port;
use terrace_fabric::udp::UdpPort;
use terrace_nic::DeviceName;

const AFTER_HELP: &str = "\
Examples:
  terrace devices                    # the default address: the first interface's, or the loopback's
  terrace devices --addr 127.0.0.1
  terrace devices --json

A GID is an RDMA port's address. The address given with --addr has index 0; programs choose another
one with an option like -x or -g INDEX.";

/// Options of `terrace devices`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// Address of this host, as for `terrace run`
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_ADDR", hide_env_values = true)]
    addr: Option<String>,
    /// Path MTU in bytes, as for `terrace run`
    #[arg(long, value_name = "BYTES", env = "TERRACE_MTU", hide_env_values = true)]
    mtu: Option<String>,
    /// Name of the device, as for `terrace run`
    #[arg(long, value_name = "NAME", env = "TERRACE_DEVICE_NAME", hide_env_values = true, default_value_t)]
    device_name: DeviceName,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DeviceView {
    name: String,
    /// Largest path MTU in bytes.
    mtu: u32,
    /// The first free UDP port, for the next process.
    udp_port: u16,
    gids: Vec<GidView>,
}

#[derive(Serialize)]
struct GidView {
    index: usize,
    gid: String,
    address: String,
    interface: String,
    r#type: &'static str,
}

/// Prints the device.
pub fn show(options: &Options) -> Result<(), RunError> {
    let port = UdpPort::open(&parse_port(options.addr.as_deref(), options.mtu.as_deref())?)?;
    let device = view(&port, &options.device_name);
    let text = if options.json { json::list("devices", &[device]) } else { render(&device) };
    print(&text).map_err(RunError::Output)?;
    Ok(())
}

fn view(port: &dyn Port, name: &DeviceName) -> DeviceView {
    let gids = port.gids().iter().enumerate().map(|(index, gid)| GidView {
        index,
        gid: full_form(Ipv6Addr::from(gid.raw)),
        address: gid.addr.to_string(),
        interface: gid.interface.clone(),
        r#type: "RoCE v2",
    });
    DeviceView {
        name: name.to_string(),
        mtu: port.mtu_limit(),
        udp_port: port.udp_port(),
        gids: gids.collect(),
    }
}

/// All eight groups with leading zeros, as other RDMA tools print GIDs.
fn full_form(gid: Ipv6Addr) -> String {
    gid.segments().map(|group| format!("{group:04x}")).join(":")
}

fn render(device: &DeviceView) -> String {
    let rows: Vec<Vec<String>> = device
        .gids
        .iter()
        .map(|gid| {
            vec![
                gid.index.to_string(),
                gid.gid.clone(),
                gid.address.clone(),
                gid.interface.clone(),
                gid.r#type.to_owned(),
            ]
        })
        .collect();
    format!(
        "{}: path MTU {} bytes, next free UDP port {}\n\n{}",
        device.name,
        device.mtu,
        device.udp_port,
        table::render(&["index", "GID", "address", "interface", "type"], &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_written_out_in_full() {
        assert_eq!(full_form("::ffff:127.0.0.1".parse().unwrap()), "0000:0000:0000:0000:0000:ffff:7f00:0001");
    }
}
