"""The words that names of boxes are made of. Changing them renames every box."""

from __future__ import annotations

from typing import Final

QUALITIES: Final = tuple(
    """
    agile airy alert amber ample apt arctic ashen autumn azure balmy beige blithe blond blue bold brave breezy brief
    bright brisk bronze brown calm candid cedar chalky chilly civil clear clever cobalt cool copper coral cosmic
    cosy crimson crisp curious dainty dapper daring deep deft dewy dry dusky dusty eager early earnest easy elder
    ember even fair famous fast fine firm fleet fluffy fond frank free fresh frosty gentle giant gilded glad golden
    grand green grey hale handy happy hardy hazel hazy honest humble indigo ivory jade jolly jovial keen kind large
    late lean light lilac lime little lively lofty loud loyal lucid lucky lunar maple mellow merry mild mint misty
    modest mossy neat new nimble noble northern oaken ochre olive opal open orange pale patient pearly placid plain
    plucky polar polite proud prime pure purple quick quiet rapid rare ready red regal robust rosy round royal ruby
    rural rusty sable sage sandy scarlet serene sharp shiny silent silky silver simple sleek slim slow smart smooth
    snowy solar solid sonic spry stable starry steady stoic stout sturdy summer sunny sure swift tall tame tawny
    teal tender tidy tiny topaz true umber upbeat urban vast velvet verdant vivid warm wary western white wide wild
    windy winter wise witty woody young zesty
    """.split()  # noqa: SIM905 (a list of a word a line would be pages long)
)

ANIMALS: Final = tuple(
    """
    adder agouti albatross alpaca ant antelope auk avocet axolotl badger barb bass bat beagle bear beaver bee beetle
    bison bittern boa boar bobcat bongo buffalo bunting bustard buzzard camel caracal caribou carp cat cheetah
    chough cicada civet clam cobra cockle cod collie condor coot cormorant cougar coyote crab crane cricket crow
    cuckoo curlew deer dhole dingo dipper dodo dolphin donkey dormouse dove dragonfly drake duck dugong dunlin eagle
    eel egret eider eland elk emu ermine falcon fennec ferret finch firefly flamingo fox frog gannet gar gazelle
    gecko gerbil gibbon giraffe gnu goat godwit goose gopher goral grebe grouse guanaco gull guppy haddock hamster
    hare harrier hawk hedgehog heron herring hobby hornet horse hound hyena ibex ibis iguana impala jackal jackdaw
    jaguar jay jerboa kestrel kingfisher kite kiwi koala kudu lapwing lark lemming lemur leopard limpet linnet lion
    lizard llama lobster loon lynx macaw magpie mallard manatee mantis marlin marmot marten merlin mink minnow mole
    mongoose moose moth mouse mule mussel narwhal newt nightjar ocelot octopus okapi orca oriole oryx osprey otter
    owl ox oyster panda panther parrot partridge pelican penguin perch petrel pheasant pigeon pike pintail pipit
    plover pony porpoise puffin puma python quail quokka rabbit raccoon ram raven ray redstart reindeer robin rook
    ruff salmon sandpiper seal serval shark sheep shrew shrike shrimp siskin skink skua skylark sloth snail snipe
    sparrow squid squirrel starling stoat stork sturgeon swallow swan swift tapir tarsier teal tern thrush tiger
    toad tortoise toucan trout tuna turtle urchin viper vole wagtail wallaby walrus warbler wasp weasel whale whelk
    wigeon wolf wombat woodcock wren yak zebra
    """.split()  # noqa: SIM905 (a list of a word a line would be pages long)
)
