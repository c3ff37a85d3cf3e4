//! Every figure beside its peers: `cargo bench --bench peers -- [MEASURE…] [--quick]`.
//!
//! A table per measure, with medians, counts and ratios. Nothing here passes or fails: a time is a property of the
//! machine and of who shares it, so each figure stands beside the same figure of tini, tini-static, dumb-init and
//! catatonit, taken in the same run, turn by turn.
//!
//! `SUPERVISE_BIN` names the binary to measure (several, as in PATH, to set builds side by side); without it, the one
//! that cargo built. Each measure runs in a pid namespace of its own (`bed`), so that nothing of it outlives it.

#![expect(clippy::print_stdout, reason = "the tables are what this program is for")]
#![expect(clippy::print_stderr, reason = "a wrong call is answered on stderr")]

mod bed;
mod measure;

use std::env;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bed::peer::{Peer, find_all};
use bed::{Scene, facts, role};
use measure::{MEASURES, Measure};

/// No measure takes longer than this; its namespace is killed if it does.
const LIMIT: Duration = Duration::from_secs(900);

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [flag, role, arguments @ ..] = arguments.as_slice()
        && flag == role::FLAG
    {
        return role::play(role, arguments);
    }
    if arguments.is_empty() {
        // That is `cargo test --all-targets`, which runs benches, too, and doesn't add `--bench`.
        println!("peers: nothing asked, nothing measured; try cargo bench --bench peers -- --quick");
        return ExitCode::SUCCESS;
    }
    match Asked::from(&arguments) {
        Ok(asked) => match run(&asked) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("peers: {error}");
                ExitCode::FAILURE
            }
        },
        Err(wrong) => {
            eprintln!("peers: {wrong}");
            eprintln!("usage: cargo bench --bench peers -- [MEASURE…] [--quick]");
            for measure in MEASURES {
                eprintln!("  {:<12} {}", measure.name, measure.what);
            }
            ExitCode::from(2)
        }
    }
}

/// What the command line asks for.
struct Asked {
    measures: Vec<&'static Measure>,
    quick: bool,
}

impl Asked {
    fn from(arguments: &[String]) -> Result<Self, String> {
        let mut asked = Asked { measures: Vec::new(), quick: false };
        for argument in arguments {
            match argument.as_str() {
                // Cargo adds it to the arguments of every bench.
                "--bench" => {}
                "--quick" => asked.quick = true,
                name => match MEASURES.iter().find(|measure| measure.name == name) {
                    Some(measure) => asked.measures.push(measure),
                    None => return Err(format!("no measure is called {name:?}")),
                },
            }
        }
        if asked.measures.is_empty() {
            asked.measures.extend(MEASURES);
        }
        Ok(asked)
    }
}

fn run(asked: &Asked) -> io::Result<()> {
    let built = PathBuf::from(env!("CARGO_BIN_EXE_supervise"));
    let (peers, absent) = find_all(env::var_os("SUPERVISE_BIN"), built)?;
    print_machine(&peers, &absent)?;
    for measure in &asked.measures {
        let ended = bed::run(LIMIT, |bed| {
            let scene = Scene { bed, peers: peers.clone(), quick: asked.quick, itself: env::current_exe()? };
            for table in (measure.take)(&scene)? {
                println!("\n{table}");
            }
            Ok(())
        })?;
        if let Some(trouble) = ended {
            println!("\n{}: not measured: {trouble}", measure.name);
        }
    }
    Ok(())
}

fn print_machine(peers: &[Peer], absent: &[&str]) -> io::Result<()> {
    println!("machine: {}", facts::machine()?);
    for peer in peers {
        println!("  {:<12} {} ({})", peer.name, peer.program.display(), facts::binary(&peer.program)?);
    }
    for name in absent {
        println!("  {name:<12} absent: not in PATH, not measured");
    }
    Ok(())
}
