use super::*;
use crate::load::preset;

#[test]
fn a_preset_as_people_see_it() {
    let text = render_text(&preset("r420").unwrap());
    let expected = "\
r420: 2 nodes, 24 CPUs (12 cores, 2 threads per core), 32GiB of memory

node  socket  CPUs        cores  memory  bandwidth  LLC
0          0  0-5,12-17       6   16GiB     28GB/s  15MiB, 20-way
1          1  6-11,18-23      6   16GiB     28GB/s  15MiB, 20-way

distance   0   1
0         10  20
1         20  10

link     bandwidth
0 <-> 1  12GB/s each way

timing
clock          1.90 GHz
L1 / L2 / LLC  4 / 12 / 36 cycles
memory         77 ns, and 55 ns per hop

note: only the model and its two sockets are published; the processor is assumed to be the Xeon E5-2420
";
    assert_eq!(text, expected);
}

#[test]
fn what_is_odd_is_shown() {
    let text = "name = \"odd\"\n[[node]]\nid = 0\nsocket = 0\ncpus = \"0-1\"\nmemory = \"1GiB\"\n\
        [[node]]\nid = 4\nsocket = 0\ncpus = \"2-3\"\nmemory = \"0B\"\n[[node]]\nid = 5\ncpus = \"\"\nmemory = \"2GiB\"\n\
        [llc]\nsize = \"8MiB\"\nline_bytes = 64\nshared_by = \"socket\"\n\
        [[links]]\ndirected = [[0, 4], [4, 5], [5, 0]]\n[distances]\nby_hops = [10, 12, 14]\n\
        [[devices]]\naddress = \"0000:3b:00.0\"\nclass = \"0x020000\"\nnode = 4\n\
        [[devices]]\naddress = \"0000:3c:00.0\"\nclass = \"0x050000\"\nnode = 4\n";
    let mut machine = crate::load::from_toml("odd.toml", text).unwrap();
    machine.memory_allowed.remove(NodeId(5));
    let expected = "\
odd: 3 nodes, 4 CPUs (4 cores, 1 thread per core), 3GiB of memory

node  socket  CPUs  cores              memory  bandwidth  LLC
0          0  0-1       2                1GiB          -  8MiB, with node 4
4          0  2-3       2                  0B          -  8MiB, with node 0
5          -  none      0  2GiB (not allowed)          -  -

distance   0   4   5
0         10  12  14
4         14  10  12
5         12  14  10

link    bandwidth
0 -> 4  -
4 -> 5  -
5 -> 0  -

device        node  kind
0000:3b:00.0     4  network (0x020000)
0000:3c:00.0     4  0x050000
";
    assert_eq!(render_text(&machine), expected);
}

#[test]
fn a_long_list_of_devices_is_cut() {
    let mut machine = preset("amd48").unwrap();
    machine.devices = vec![machine.devices[0].clone(); 20];
    assert!(render_text(&machine).contains("\nand 4 more\n"));
}
